"""What programs are made of: functions, ways to write their rules, forms and transformations.

Each piece stands on its own, so that a program is printed as the text of its pieces.
"""

from fuzz.pieces.forms import *  # noqa: F403
from fuzz.pieces.functions import *  # noqa: F403
from fuzz.pieces.rules import *  # noqa: F403
from fuzz.pieces.steps import *  # noqa: F403
