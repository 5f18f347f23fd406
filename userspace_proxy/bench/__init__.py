"""`userspace-proxy bench`: measures load balancers side by side, and whether they balance at all.

A run reads top to bottom:

    scenario_file -> scenario      what is asked for
    backend, targets, generator    three kinds of processes: who answers, who is judged, who asks
    runner                         interleaved rounds, events, cost; raw samples become `results`
    analysis                       PURE: results -> findings, thresholds, comparisons
    output                         table, JSON, CSV, .hgrm, HTML

One rule everywhere: what the harness cannot know, or is itself the cause of, it does not say of a target.
"""
