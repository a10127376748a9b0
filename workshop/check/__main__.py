from workshop.check.cli import main

main()
