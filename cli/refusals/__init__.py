"""Error messages for users: known failures, unsupported settings, the exception that caused one."""
