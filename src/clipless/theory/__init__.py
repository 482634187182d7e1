"""What the papers prove, as functions of NumPy arrays that can be checked and drawn. Imports no torch.

- `auto_bounds`, `auto_laws`: AUTO's convergence bounds and what they say about steps, batch, start and learning rate.
- `lazy_regions`, `directions`, `rules`: where AUTO-V and Abadi stand still; how far each rule is from the best direction.
- `dc`: DC-SGD's expected error E(C), its minimiser and the convergence bound.
- `facts`, `ntk`, `flows`: GLOBAL's facts about matrices in exact arithmetic, the clipped neural tangent kernel, and the
  flows that optimizers follow at small steps.

AUTO is "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger" (Bu, Wang, Zha, Karypis); DC is
"DC-SGD: Differentially Private SGD with Dynamic Clipping through Gradient Norm Distribution Estimation" (Wei, Li, Gong,
Chen); GLOBAL is "On the Convergence and Calibration of Deep Learning with Differential Privacy" (Bu, Wang, Dai, Long).
`clipless reproduce theory` draws their figures.
"""

from clipless.theory import auto_bounds, auto_laws, dc, directions, facts, flows, lazy_regions, ntk, rules

__all__ = ["auto_bounds", "auto_laws", "dc", "directions", "facts", "flows", "lazy_regions", "ntk", "rules"]
