from cake_shared.testing.gdn_suite.options import *  # noqa: F403
