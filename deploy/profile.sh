# Login shells, in which KubeRay starts Ray, begin with a PATH of their own.
PATH=/opt/pliant/bin:$PATH
