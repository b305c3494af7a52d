// The functions that Python calls: those of the rule as every GDN package has them.
#include "cake/gdn/host/exports.h"
