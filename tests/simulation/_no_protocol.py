"""What by nature is no protocol, and is not counted: no order of messages, failures or threads changes it.

These functions parse command lines, make texts for people, ask the platform, or run Python code of others;
their own tests cover them. A function is left out with those within it, and a class with its methods; `"*"`
stands for a whole module.

Tests: tests/unit/test_simulation.py.
"""

import ast

#: By module: the functions, and why.
NO_PROTOCOL = {
    "launcher/_options": (
        (
            "__post_init__", "_check_at_least", "_check_elastic", "parse_elastic", "parse_spares",
            "UserProgram",
        ),
        "a command line is checked",
    ),
    "launcher/_launch": (
        (
            "run_program", "dry_run", "check_program", "_check_is_no_task", "make_run_paths", "visible_gpus",
            "cores", "stop_signals",
        ),
        "the command: its arguments, the devices of the machine, the handlers of real signals",
    ),
    "launcher/_launch_file": (("*",), "a text about the launch"),
    "launcher/_plan": (
        ("shell_lines", "start_up_block", "_table", "_policy_text", "base_environment", "gpus_of"),
        "texts for a terminal; variables of libraries",
    ),
    "launcher/_function_call": (
        ("pickle_call", "write_call", "path_of_call", "read_results", "raise_failure", "_unpickled"),
        "functions and errors are pickled",
    ),
    "launcher/_stall_detector": (("is_stopped",), "a file of Linux is parsed"),
    "launcher/_task": (
        (
            "warm_up", "finish_warm_up", "_import_all", "_set_group_priority", "follow_late_variables",
            "_update_jax", "take_over", "set_title", "_write_to_log", "_open_log", "_Log", "_tolerant_stream",
            "_first_path", "_run_script", "_run_module", "_execute", "_warn_alone", "_computes_apart",
            "_call", "_pickled_value", "without_own_frames", "_first_line", "_pickle",
        ),
        "Python runs a program: imports, priorities, descriptors, frames",
    ),
    "rpc/_transport/_keys": (
        ("keys_of", "read_keys", "_read_secret", "_file_problem"),
        "a secret is read from the environment or a file, and checked",
    ),
    "rpc/_transport/_client_thread": (
        ("_end_with_process", "_forget_thread"),
        "what Python calls at its end, and in a forked process",
    ),
    "standalone/_client": (
        (
            "ClusterRun", "run_on_cluster", "call_on_cluster", "_CallConsole", "_function_program",
            "run_program_on_cluster", "_script_program", "_serving", "check_versions", "describe_client",
            "_start_text", "loaded_sources", "_source_of", "_is_at_its_name", "_installed_folders",
            "script_sources", "given_files", "_checked",
        ),
        "arguments and texts; which sources travel with a program",
    ),
    "standalone/_protocol": (
        ("read_standalone_keys", "task_of", "file_name", "printable", "ProcessShape"),
        "fields of messages are checked, which tests/fuzzing tries",
    ),
    "standalone/_server": (
        (
            "run_standard_server", "serve", "_is_address", "_access", "shown_name", "address_of_tf_config",
            "_object", "_wrong",
        ),
        "the command and TF_CONFIG",
    ),
    "standalone/_server_job": (("read_seen",), "a field is checked, which tests/fuzzing tries"),
    "standalone/_server_machine": (("server_directory",), "the owner of a folder is checked"),
    "standalone/_slots": (("of", "parse_cluster"), "a cluster is parsed"),
    "standalone/_agent": (("resident_bytes",), "a file of Linux is parsed"),
}  # fmt: skip


def lines_left_out(module, source):
    """Return the lines of a module that are not counted.

    >>> lines_left_out("launcher/_stall_detector", "a = 1\\ndef is_stopped():\\n    return 0\\n")
    {3}
    """
    names, _ = NO_PROTOCOL.get(module, ((), ""))
    tree = ast.parse(source)
    if names == ("*",):
        return set(range(1, source.count("\n") + 2))
    found = set()
    known = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            known.add(node.name)
            # Their first lines run when the module is imported.
            found |= set(range(node.body[0].lineno, node.end_lineno + 1))
    if missing := set(names) - known:
        raise ValueError(f"{module} must have the functions {sorted(missing)}, which are left out.")
    return found
