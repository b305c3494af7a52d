from cake_shared.testing.gdn_suite.determinism import *  # noqa: F403
