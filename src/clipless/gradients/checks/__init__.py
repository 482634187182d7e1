"""What a run checks on its own model, loss and batch: records stay apart, and no gradient is lost."""
