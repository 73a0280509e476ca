"""A chat in the terminal: the command `spd-chat`, docs/terminal-chat.md."""
