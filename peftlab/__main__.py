"""``python -m peftlab``."""

from peftlab.cli.app import main

if __name__ == "__main__":
    main()
