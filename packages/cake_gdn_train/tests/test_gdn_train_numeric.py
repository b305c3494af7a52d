from cake_shared.testing.gdn_suite.numeric import *  # noqa: F403
