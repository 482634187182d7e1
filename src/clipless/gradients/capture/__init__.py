"""Where gradients are caught: hooks on the model, taps on what it computes, and the receiver of what arrives there."""
