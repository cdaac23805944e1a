"""The paper's Tables 2 to 4, each a command that resumes, and the demo; Table 1 and the positions are scripts.

Uses every other room but `cli`.
"""
