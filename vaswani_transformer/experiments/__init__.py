"""The paper's tables and studies, each a command that resumes: Tables 1 to 4, positions, heads; and the demo.

Uses every other room but `cli`.
"""
