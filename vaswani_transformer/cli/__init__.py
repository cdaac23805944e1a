"""The command `vaswani`: its options, what it prints, its exit statuses. The only room that prints.

Each module adds one command or a few that belong together; the work itself is done by the other rooms.
"""
