"""``python -m peftlab``."""

from peftlab.cli import main

if __name__ == "__main__":
    main()
