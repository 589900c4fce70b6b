package client

// kind is how a test of the suite is run.
type kind int

const (
	// plain runs against the stack's containerd, with the cube snapshotter.
	plain kind = iota
	// sample is plain and part of `make test`.
	sample
	// slow is plain and takes up to an hour on a busy host without KVM: it sends 700 MB through a terminal.
	slow
	// daemon has the suite start, and restart, a containerd of its own, with overlayfs.
	daemon
	// skip isn't run.
	skip
)

// row says of one test of the suite what is done with it, and why where it isn't run. A name with a slash is a subtest
// that is skipped of a test that is run.
type row struct {
	name   string
	kind   kind
	reason string
}

// Reasons that several tests share.
const (
	hostNamespace = "the host's PID namespace is refused: the container's kernel is another one"
	runcOnly      = "about runc: its binary, its options or its failpoints"
	checkpoint    = "it looks for CRIU; the suite snapshot tests checkpoints"
	userNamespace = "user namespaces and id-mapped mounts are refused, and `-info` says so"
	daemonOnly    = "about containerd's own configuration"
)

// table has every test of the suite.
var table = []row{
	// Containers and tasks.
	{"TestContainerList", plain, ""},
	{"TestNewContainer", plain, ""},
	{"TestContainerStart", sample, ""},
	{"TestContainerStartWithAbsRuntimePath", daemon, ""},
	{"TestContainerOutput", sample, ""},
	{"TestContainerWait", plain, ""},
	{"TestContainerExec", sample, ""},
	{"TestContainerLargeExecArgs", plain, ""},
	{"TestContainerPids", skip, "counts the processes on the host, where a container has one, QEMU; pids of the guest mean nothing there"},
	{"TestContainerCloseIO", plain, ""},
	{"TestDeleteRunningContainer", plain, ""},
	{"TestContainerKill", sample, ""},
	{"TestKillContainerDeletedByRunc", skip, runcOnly},
	{"TestContainerNoBinaryExists", plain, ""},
	{"TestContainerExecNoBinaryExists", plain, ""},
	{"TestWaitStoppedTask", plain, ""},
	{"TestWaitStoppedProcess", plain, ""},
	{"TestTaskForceDelete", plain, ""},
	{"TestProcessForceDelete", plain, ""},
	{"TestContainerHostname", plain, ""},
	{"TestContainerExitedAtSet", plain, ""},
	{"TestDeleteContainerExecCreated", plain, ""},
	{"TestContainerMetrics", plain, ""},
	{"TestDeletedContainerMetrics", plain, ""},
	{"TestContainerExtensions", plain, ""},
	{"TestContainerUpdate", plain, ""},
	{"TestContainerInfo", plain, ""},
	{"TestContainerLabels", plain, ""},
	{"TestContainerHook", plain, ""},
	{"TestShimSockLength", plain, ""},
	{"TestContainerExecLargeOutputWithTTY", slow, ""},
	{"TestShortRunningTaskPid", plain, ""},
	{"TestRegressionIssue4769", plain, ""},
	{"TestRegressionIssue6429", plain, ""},
	{"TestContainerKillInitKillsChildWhenNotHostPid", plain, ""},
	{"TestTaskResize", sample, ""},
	{"TestContainerImage", plain, ""},
	{"TestContainerNoImage", plain, ""},
	{"TestContainerNoSTDIN", plain, ""},
	{"TestTaskSpec", plain, ""},
	{"TestContainerUsername", plain, ""},
	{"TestContainerPTY", plain, ""},
	{"TestTaskUpdate", skip, "reads the memory limit from the cgroup of the task's pid on the host, which has the whole machine in it; the container's is in the guest"},
	{"TestContainerRestartPolicyAlways", plain, ""},
	{"TestShimInCgroup", skip, "options.ShimCgroup is runc's; machines have cgroups of their own"},
	{"TestShimDoesNotLeakPipes", daemon, ""},
	{"TestShimDoesNotLeakSockets", plain, ""},
	{"TestContainerAttach", plain, ""},
	{"TestContainerUser", sample, ""},
	{"TestContainerAttachProcess", plain, ""},
	{"TestContainerLoadUnexistingProcess", plain, ""},
	{"TestContainerUserID", plain, ""},
	{"TestContainerKillAll", skip, hostNamespace},
	{"TestContainerRuntimeOptionsv2", skip, runcOnly},
	{"TestContainerKillInitPidHost", skip, hostNamespace},
	{"TestUserNamespaces", skip, userNamespace},
	{"TestUIDNoGID", plain, ""},
	{"TestBindLowPortNonRoot", plain, ""},
	{"TestBindLowPortNonOpt", plain, ""},
	{"TestShimOOMScore", skip, "finds the shim by ShimCgroup; without it, it looks at no process"},
	{"TestIssue9103", plain, ""},
	{"TestIssue9103/should_be_stopped_status_if_init_has_been_killed", skip, runcOnly},
	{"TestIssue10589", skip, runcOnly},
	{"TestIssue13030", plain, ""},
	{"TestRuntimeInfo", plain, ""},
	{"TestNewTaskWithRuntimeOption", plain, ""},
	{"TestDefaultRuntimeWithNamespaceLabels", plain, ""},

	// The life of containerd under running tasks.
	{"TestDaemonRestart", daemon, ""},
	{"TestDaemonReconnectsToShimIOPipesOnRestart", daemon, ""},
	{"TestDaemonRestartWithRunningShim", daemon, ""},
	{"TestRestartMonitor", skip, "runs its containers with runc; TestContainerRestartPolicyAlways has the restart monitor and our runtime"},
	{"TestDaemonRuntimeRoot", skip, runcOnly},
	{"TestDaemonCustomCgroup", skip, daemonOnly},

	// Images and snapshots.
	{"TestImagePull", plain, ""},
	{"TestImagePullWithDiscardContent", plain, ""},
	{"TestImagePullAllPlatforms", plain, ""},
	{"TestImagePullSomePlatforms", plain, ""},
	{"TestImagePullWithConcurrencyLimit", plain, ""},
	{"TestImagePullWithTracing", plain, ""},
	{"TestImagePullWithConcurrentUnpacks", plain, ""},
	{"TestPullFetchAllContent", plain, ""},
	{"TestImageIsUnpacked", plain, ""},
	{"TestImagePullWithDistSourceLabel", plain, ""},
	{"TestImageUsage", plain, ""},
	{"TestImageSupportedBySnapshotter_Error", plain, ""},
	{"TestSnapshotterClient", skip, "about the overlayfs snapshotter; ours has the same suite in `snapshotter`"},
	{"TestExportAndImport", plain, ""},
	{"TestExportAndImportMultiLayer", plain, ""},
	{"TestExportAllCases", plain, ""},
	{"TestExportAllCases/export_image_setting_ocispec.AnnotationRefName", skip, "pulls an image by a digest on the Internet"},
	{"TestImport", plain, ""},
	{"TestTransferImport", plain, ""},
	{"TestTransferEcho", plain, ""},
	{"TestConvert", plain, ""},
	{"TestContentClient", plain, ""},
	{"TestLeaseResources", plain, ""},
	{"TestMountManager", plain, ""},
	{"TestMountAtRuntime", skip, "has a container write to an overlay on the host; a machine gets an image, or a copy of a directory"},
	{"TestIDMappedOverlay", skip, userNamespace},

	// The client itself.
	{"TestNewClient", plain, ""},
	{"TestClientReconnect", plain, ""},
	{"TestClientTTRPC_New", plain, ""},
	{"TestClientTTRPC_Reconnect", plain, ""},
	{"TestClientTTRPC_Close", plain, ""},
	{"TestMigration", skip, daemonOnly},

	{"TestCheckpointRestorePTY", skip, checkpoint},
	{"TestCheckpointRestore", skip, checkpoint},
	{"TestCheckpointRestoreNewContainer", skip, checkpoint},
	{"TestCheckpointLeaveRunning", skip, checkpoint},
	{"TestCheckpointRestoreWithImagePath", skip, checkpoint},
	{"TestCheckpointOnPauseStatus", skip, checkpoint},
}
