package conformance

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

var binaryRows = []row{
	{name: "Info", test: info},
	{name: "StartTwice", test: startTwice},
	{name: "StartWithoutSpec", test: startWithoutSpec},
	{name: "DeleteOfNothing", test: deleteOfNothing},
	{name: "MountCapabilities", test: mountCapabilities},
	{name: "FailedCreate", test: failedCreate},
	{name: "RuntimeOptions", test: runtimeOptions},
}

func info(b *box) {
	out, err := exec.CommandContext(b.d.context(b.T), b.d.binary, "-info").Output()
	b.must(err)
	var i types.RuntimeInfo
	b.must(proto.Unmarshal(out, &i))
	if i.Name != "io.cube.v2" || i.Version.GetVersion() == "" || i.Features.GetTypeUrl() != ociType+"features/Features" {
		b.Errorf("info %v", &i)
	}
	var f features.Features
	b.must(json.Unmarshal(i.Features.GetValue(), &f))
	// containerd passes id-mapped mounts on to a runtime that doesn't deny them.
	if e := f.Linux.MountExtensions.IDMap.Enabled; e == nil || *e {
		b.Error("id-mapped mounts aren't denied")
	}
}

// startTwice: containerd that asks again for what there is gets the same shim.
func startTwice(b *box) {
	b.boot()
	r, err := b.d.start(b.d.context(b.T), b.id, b.bundle)
	b.must(err)
	if r.Address != "unix://"+b.address {
		b.Errorf("two shims: at %s and %s", b.address, r.Address)
	}
}

// startWithoutSpec: the bundles of sandboxes have no config.json.
func startWithoutSpec(b *box) {
	b.boot()
	_, err := b.client.Create(b.d.context(b.T), &taskapi.CreateTaskRequest{ID: b.id, Bundle: b.bundle, Rootfs: b.rootfs})
	b.refused("create without config.json", err, codes.InvalidArgument)
}

func deleteOfNothing(b *box) {
	if r := b.clean(); r.ExitStatus != 137 || r.ExitedAt == nil {
		b.Errorf("shim delete answers %v", r)
	}
}

// mountCapabilities: containerd mounts nothing of what the machine gets as a disk.
func mountCapabilities(b *box) {
	r, err := b.d.start(b.d.context(b.T), b.id, b.bundle)
	b.must(err)
	b.dial(r.Address)
	var caps types.MountCapabilities
	found, err := r.FindExtension(&caps)
	b.must(err)
	for _, t := range []string{"ext4", "erofs", "loop"} {
		if !found || !strings.Contains(strings.Join(caps.Types, " "), t) {
			b.Errorf("capabilities %v don't have %s", &caps, t)
		}
	}
}

// failedCreate leaves nothing, not even an event, and can be tried again.
func failedCreate(b *box) {
	for what, spoil := range map[string]func(*taskapi.CreateTaskRequest){
		"image": func(r *taskapi.CreateTaskRequest) {
			r.Rootfs = []*types.Mount{{Type: "ext4", Source: b.bundle + "/missing.img", Options: []string{"loop"}}}
		},
		"file system": func(r *taskapi.CreateTaskRequest) {
			r.Rootfs = []*types.Mount{{Type: "strange", Source: b.rootfs[0].Source}}
		},
		"fifo":   func(r *taskapi.CreateTaskRequest) { r.Stdout = b.bundle + "/missing" },
		"scheme": func(r *taskapi.CreateTaskRequest) { r.Stdout = "strange:///log" },
	} {
		r := b.request(exit(0))
		spoil(r)
		_, err := b.client.Create(b.d.within(b.T, bootLimit), r)
		b.init.opened()
		if err == nil || strings.Contains(err.Error(), "\n") {
			b.Fatalf("create with a bad %s: %v", what, err)
		}
		b.refused("state after a failed create", second(b.init.state()), codes.NotFound)
	}
	if got := b.events(); len(got) > 0 {
		b.Errorf("events %q", got)
	}
	b.run(exit(0)).ends(0, "")
}

// runtimeOptions: of what containerd passes on from the user, runc's mean nothing, and a configuration is used.
func runtimeOptions(b *box) {
	good, err := os.ReadFile(b.d.configFile())
	b.must(err)
	bad := filepath.Join(b.bundle, "options.toml")
	b.must(os.WriteFile(bad, []byte("nonsense = 1\n"), 0o600))
	create := func(b *box, o any) error {
		r := b.request(sleep)
		var err error
		r.Options, err = typeurl.MarshalAnyToProto(o)
		b.must(err)
		resp, err := b.client.Create(b.d.within(b.T, bootLimit), r)
		b.init.opened()
		if err == nil {
			b.born(resp)
		}
		return err
	}
	b.refused("a file that isn't there", create(b, &runtimeoptions.Options{ConfigPath: bad + ".missing"}), codes.InvalidArgument)
	b.refused("a bad file", create(b, &runtimeoptions.Options{ConfigPath: bad}), codes.InvalidArgument)
	b.refused("a bad configuration", create(b, &runtimeoptions.Options{ConfigBody: []byte("nonsense = 1\n")}), codes.InvalidArgument)
	b.must(create(b, &runtimeoptions.Options{ConfigBody: good}))
	c := b.d.box(b.T)
	c.must(create(c, &options.Options{BinaryName: "/usr/bin/runc", SystemdCgroup: true}))
}
