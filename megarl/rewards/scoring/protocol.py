"""What the pool, its template and its workers say to each other.

On the template's control socket, one packet a message: the setup, answered by READY; then FORK with a socket
for the new worker, answered by its pid; and REAP with a pid, answered by its wait status.

On a worker's socket: READY once; then for each job the job in, STARTED out when its verifier is imported
(imports don't count against the time bound), the verdict out. Jobs come from our own process and are pickled
(ground truths may hold tuples and bytes); verdicts go back as JSON, because what happens in a worker was steered
by text that a model wrote.
"""

READY = b"ready"
STARTED = b"started"
FORK = b"fork"
REAP = b"reap "
PACKET = 65536
