//go:build deps

// Package deps keeps the module's requirements while their users are being written.
package deps

import (
	_ "github.com/cavaliergopher/cpio"
	_ "github.com/containerd/cgroups/v3/cgroup1"
	_ "github.com/containerd/cgroups/v3/cgroup2"
	_ "github.com/containerd/console"
	_ "github.com/containerd/containerd/api/runtime/task/v3"
	_ "github.com/containerd/containerd/v2/client"
	_ "github.com/containerd/containerd/v2/contrib/snapshotservice"
	_ "github.com/containerd/containerd/v2/core/snapshots/testsuite"
	_ "github.com/containerd/containerd/v2/pkg/shim"
	_ "github.com/containerd/continuity/fs"
	_ "github.com/containerd/errdefs"
	_ "github.com/containerd/errdefs/pkg/errgrpc"
	_ "github.com/containerd/fifo"
	_ "github.com/containerd/log"
	_ "github.com/containerd/platforms"
	_ "github.com/containerd/plugin"
	_ "github.com/containerd/ttrpc"
	_ "github.com/containerd/typeurl/v2"
	_ "github.com/docker/go-units"
	_ "github.com/google/go-containerregistry/pkg/v1/mutate"
	_ "github.com/moby/sys/mountinfo"
	_ "github.com/moby/sys/user"
	_ "github.com/opencontainers/image-spec/specs-go/v1"
	_ "github.com/opencontainers/runtime-spec/specs-go"
	_ "github.com/pelletier/go-toml/v2"
	_ "github.com/urfave/cli/v2"
	_ "github.com/vishvananda/netlink"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sys/unix"
	_ "google.golang.org/grpc"
	_ "google.golang.org/protobuf/proto"
)
