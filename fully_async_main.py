"""`python fully_async_main.py [--config-path DIR] [--config-name NAME] [key=value …]` is `freewheel train`."""

from freewheel.fully_async_main import main

if __name__ == "__main__":
    main()
