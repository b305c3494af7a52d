from cake_shared.testing.gdn_suite.layout import *  # noqa: F403
