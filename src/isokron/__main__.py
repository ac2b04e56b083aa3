"""`python -m isokron`."""

from isokron.cli import main

if __name__ == "__main__":
    main()
