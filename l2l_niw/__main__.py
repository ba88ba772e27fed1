import sys

from l2l_niw.cli import main

if __name__ == "__main__":
    sys.exit(main())
