"""Models that other toolkits wrote, read without running code that lies in their files.

Models of ours in other formats are written in `export`.
"""
