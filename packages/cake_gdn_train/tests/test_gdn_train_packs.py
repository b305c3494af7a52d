from cake_shared.testing.gdn_suite.packs import *  # noqa: F403
