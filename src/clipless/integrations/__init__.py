"""Where people already train: each part is imported only when used, and needs the library that it is named after."""
