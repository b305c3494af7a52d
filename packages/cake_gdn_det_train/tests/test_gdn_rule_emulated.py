from cake_shared.testing.gdn_suite.emulated import *  # noqa: F403
