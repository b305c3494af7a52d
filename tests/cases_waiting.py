"""The known faults of other kernels: which a test meets under another name, and which wait.

A case that is in neither table has a test with its id in the name. `test_cases.py` checks that none is missing, and
none in two places.
"""

# Ids of all known cases: numeric ones, closed forms (CF), and those of the build.
KNOWN = (
    *("U01", "U02", "U04", "U05", "U06", "U10", "U12", "U14", "U15", "U16", "U18", "U19", "U20", "U22", "U23"),
    *("U25", "U26", "U27", "U31", "U32", "U33", "U35", "U39", "U40", "U41", "U45", "U46"),
    *("U51", "U52", "U53", "U54", "U56", "U57", "U58", "U59"),
    *("CF1", "CF2", "CF3", "CF4", "CF5"),
)

MODULES = "shared/tests/test_jit_modules.py"
COMPILERS = "shared/tests/test_jit_compilers.py"

# Cases whose tests do not have the id in their names: (file, test).
TESTED_AS = {
    "U39": (
        (MODULES, "test_eight_processes_at_once_build_once"),
        (MODULES, "test_one_killed_half_way_delays_nobody"),
        (MODULES, "test_a_module_of_zero_bytes_is_built_again_by_eight_processes"),
        (MODULES, "test_a_directory_that_cannot_be_written_costs_a_warning_not_the_run"),
    ),
    "U41": (
        (COMPILERS, "test_cuda_home_with_stray_colons_and_missing_entries"),
        (COMPILERS, "test_one_line_names_the_four_places_the_reasons_and_the_remedy"),
        (COMPILERS, "test_arch_lists_of_other_projects_decide_nothing"),
    ),
}

# Cases that wait for a CUDA program or a GPU, each with the reason.
WAITING: dict[str, str] = {}
