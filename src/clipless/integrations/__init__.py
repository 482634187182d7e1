"""Private training in other people's trainers. Each module needs its own libraries, and is imported only when used."""
