"""What `clipless bench` measures: the time and the memory of a step, private against plain, and how both grow."""
