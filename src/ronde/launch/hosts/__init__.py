"""Jobs on hosts that the user names, or a script finds: reached by ssh, or this machine."""
