"""The command `vaswani`: options, output on the terminal, exit statuses. The only room that prints."""
