"""``python -m primad``."""

from primad.cli.main import main

if __name__ == "__main__":
    main()
