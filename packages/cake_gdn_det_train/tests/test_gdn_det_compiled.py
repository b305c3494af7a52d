from cake_shared.testing.gdn_suite.compiled import *  # noqa: F403
