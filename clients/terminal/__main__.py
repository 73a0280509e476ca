from clients.terminal.cli import main

main()
