"""`python -m k3tool`: the same entry as the installed command, for torchrun and for folders without one."""

from k3tool.cli.app import main

if __name__ == "__main__":
    main()
