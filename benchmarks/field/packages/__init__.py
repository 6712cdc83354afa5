"""One module for each package; each says ``PACKAGE``."""
