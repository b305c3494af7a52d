from cake_shared.testing.gdn_suite.arguments import *  # noqa: F403
