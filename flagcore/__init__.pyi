from flagcore.api import (
    CandidateReport as CandidateReport,
)
from flagcore.api import (
    Comparison as Comparison,
)
from flagcore.api import (
    Estimate as Estimate,
)
from flagcore.api import (
    Explanation as Explanation,
)
from flagcore.api import (
    Outcome as Outcome,
)
from flagcore.api import (
    Run as Run,
)
from flagcore.api import (
    compare as compare,
)
from flagcore.api import (
    estimate as estimate,
)
from flagcore.api import (
    explain as explain,
)
from flagcore.api import (
    explain_candidate as explain_candidate,
)
from flagcore.api import (
    load_run as load_run,
)
from flagcore.api import (
    tune as tune,
)
from flagcore.errors import FlagError as FlagError

__version__: str
