from cake_shared.testing.gdn_suite.derivatives import *  # noqa: F403
