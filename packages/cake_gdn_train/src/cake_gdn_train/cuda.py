"""The CUDA side of this package: the rule's programs of `cake_shared.gdn.cuda` under this package's records."""

from cake_shared.gdn.cuda.devices import ErrorWord, PackageOnCuda, error_word_of

__all__ = ["PACKAGE", "ErrorWord", "error_word_of", "rule_backend"]

PACKAGE = "cake_gdn_train"

rule_backend = PackageOnCuda(PACKAGE).rule_backend
