from cake_shared.testing.gdn_suite.surroundings import *  # noqa: F403
