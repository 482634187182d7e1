"""Options that several commands share, single or in groups: frozen dataclasses with one option for each field. The command
line declares them, a command's body is given them. Nothing here loads what the options stand for."""
