from cake_shared.testing.gdn_suite.passes import *  # noqa: F403
