"""How far a measured share may be from the true one, given how many examples it was measured on."""

import math

NORMAL_QUANTILE = 1.959963984540054  # two-sided 95 %


def wilson(correct: float, images: float) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927): the shares p of which `correct` is no unusual outcome.

    Unlike p ± 2 standard errors it stays within [0, 1] and says something where all answers are right, or none.

    Args:
      correct: 0 to `images`.
      images: more than 0, each counted on its own: copies of an image, or frames of a film, would make it too narrow.
    """
    z2 = NORMAL_QUANTILE**2
    share = correct / images
    middle = (share + z2 / (2 * images)) / (1 + z2 / images)
    half = NORMAL_QUANTILE * math.sqrt(share * (1 - share) / images + z2 / (4 * images**2)) / (1 + z2 / images)
    return max(0.0, middle - half), min(1.0, middle + half)
