"""The application around the library: the command line and what it runs. The library never imports it."""
