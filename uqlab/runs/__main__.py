from uqlab.runs.cli import main

main()
