"""What each command does, once its options are read. `clipless.app.cli` imports a module of this package when its command
runs, so that help and completion load nothing heavy."""
