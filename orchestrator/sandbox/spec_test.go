package sandbox

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func ptr[T any](v T) *T { return &v }

func TestCommand(t *testing.T) {
	img := imagespec.ImageConfig{Entrypoint: []string{"/entry"}, Cmd: []string{"default"}}
	for _, tc := range []struct {
		name  string
		img   imagespec.ImageConfig
		entry *string
		args  []string
		want  []string // nil: an error
	}{
		{"image's", img, nil, nil, []string{"/entry", "default"}},
		{"own arguments", img, nil, []string{"a", "b"}, []string{"/entry", "a", "b"}},
		{"own entrypoint drops the image's command", img, ptr("sh"), nil, []string{"sh"}},
		{"own entrypoint and arguments", img, ptr("sh"), []string{"-c", "x"}, []string{"sh", "-c", "x"}},
		{"no entrypoint", img, ptr(""), []string{"x"}, []string{"x"}},
		{"nothing left", img, ptr(""), nil, nil},
		{"nothing at all", imagespec.ImageConfig{}, nil, nil, nil},
		{"empty word", imagespec.ImageConfig{}, nil, []string{""}, nil},
	} {
		got, err := Spec{Image: "img", Entrypoint: tc.entry, Process: Process{Args: tc.args}}.command(tc.img)
		if !reflect.DeepEqual(got, tc.want) || (err == nil) != (tc.want != nil) {
			t.Errorf("%s: %q, %v", tc.name, got, err)
		}
		if err != nil && !strings.Contains(err.Error(), "img") {
			t.Errorf("%s: %v doesn't name the image", tc.name, err)
		}
	}
	if img.Entrypoint[0] != "/entry" || len(img.Entrypoint) != 1 {
		t.Error("the image's configuration was changed")
	}
}

func generate(t *testing.T, s Spec, img imagespec.ImageConfig) (*specs.Spec, error) {
	t.Helper()
	if s.ID == "" {
		s.ID = "c1"
	}
	opts, err := s.options(img)
	if err != nil {
		return nil, err
	}
	ctx := namespaces.WithNamespace(context.Background(), "test")
	spec, err := oci.GenerateSpec(ctx, nil, &containers.Container{ID: s.ID}, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return spec, nil
}

func TestOptions(t *testing.T) {
	img := imagespec.ImageConfig{
		Env:        []string{"PATH=/bin", "A=image", "B=image"},
		Cmd:        []string{"true"},
		WorkingDir: "/srv",
		User:       "1000:1001",
	}
	spec, err := generate(t, Spec{
		ID:          strings.Repeat("c", 76),
		Process:     Process{Env: []string{"A=mine", "B", "C=new"}, TTY: true},
		CPUs:        1.5,
		Memory:      512 << 20,
		Annotations: map[string]string{"io.cube.vcpus": "2"},
	}, img)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"PATH=/bin", "A=mine", "TERM=xterm", "C=new"}; !reflect.DeepEqual(spec.Process.Env, want) {
		t.Errorf("env %q, want %q", spec.Process.Env, want)
	}
	if spec.Process.Cwd != "/srv" || !spec.Process.Terminal || spec.Annotations["io.cube.vcpus"] != "2" {
		t.Errorf("process %+v, annotations %v", spec.Process, spec.Annotations)
	}
	if u := spec.Process.User; u.UID != 1000 || u.GID != 1001 {
		t.Errorf("user %+v", u)
	}
	if len(spec.Hostname) > 63 {
		t.Errorf("the kernel takes no host name of %d bytes", len(spec.Hostname))
	}
	cpu, mem := spec.Linux.Resources.CPU, spec.Linux.Resources.Memory
	if *cpu.Quota != 150_000 || *cpu.Period != 100_000 || *mem.Limit != 512<<20 {
		t.Errorf("limits %d/%d µs, %d bytes", *cpu.Quota, *cpu.Period, *mem.Limit)
	}

	spec, err = generate(t, Spec{Process: Process{Cwd: "/tmp", User: "root"}}, imagespec.ImageConfig{Cmd: []string{"true"}, WorkingDir: "/srv", User: "7:7"})
	if err != nil {
		t.Fatal(err)
	}
	if spec.Process.Cwd != "/tmp" || spec.Process.User.UID != 0 || !slices.Contains(spec.Process.Env, defaultPath) {
		t.Errorf("the request goes before the image: %+v", spec.Process)
	}
	if r := spec.Linux.Resources; r.CPU != nil && r.CPU.Quota != nil || r.Memory != nil {
		t.Errorf("limits that nobody asked for: %+v", r)
	}
}

func TestOptionsRefuse(t *testing.T) {
	img := imagespec.ImageConfig{Cmd: []string{"true"}}
	for name, s := range map[string]Spec{
		"tiny CPU":        {CPUs: 0.001},
		"negative CPU":    {CPUs: -1},
		"absurd CPU":      {CPUs: 1e9},
		"negative memory": {Memory: -1},
	} {
		if _, err := generate(t, s, img); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

func TestExecProcess(t *testing.T) {
	base := &specs.Process{
		Args: []string{"init"}, Env: []string{"PATH=/bin", "A=1"}, Cwd: "/srv",
		User:         specs.User{UID: 5, GID: 5},
		Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}},
	}
	got, err := execProcess(base, Process{Args: []string{"sh"}, Env: []string{"A=2"}, TTY: true})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"PATH=/bin", "A=2", "TERM=xterm"}; !reflect.DeepEqual(got.Env, want) && !slices.Contains(got.Env, "TERM=xterm") {
		t.Errorf("env %q, want %q", got.Env, want)
	}
	if got.Args[0] != "sh" || got.Cwd != "/srv" || !got.Terminal || got.User.UID != 5 || got.Capabilities == nil {
		t.Errorf("%+v", got)
	}
	if base.Args[0] != "init" || base.Terminal || base.Env[1] != "A=1" {
		t.Errorf("the container's own process was changed: %+v", base)
	}
	if got, err := execProcess(base, Process{Args: []string{"id"}, User: "33:33", Cwd: "/tmp"}); err != nil || got.User.UID != 33 || got.Cwd != "/tmp" {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := execProcess(base, Process{Args: []string{"id"}, User: "nobody"}); err == nil || !strings.Contains(err.Error(), "nobody") {
		t.Errorf("a name can't be looked up: %v", err)
	}
	if _, err := execProcess(base, Process{}); err == nil {
		t.Error("no command was taken")
	}
}

func TestNumericUser(t *testing.T) {
	for in, want := range map[string]*specs.User{
		"0":              {AdditionalGids: []uint32{0}},
		"root":           {AdditionalGids: []uint32{0}},
		"12:34":          {UID: 12, GID: 34, AdditionalGids: []uint32{34}},
		"12":             nil, // its group is in passwd
		"www-data":       nil,
		"12:staff":       nil,
		"-1:0":           nil,
		"4294967296:0":   nil,
		"2147483648:0":   nil, // above runc's and containerd's greatest
		"1:2:3":          nil,
		"":               nil,
		":":              nil,
		"2147483647:100": {UID: 2147483647, GID: 100, AdditionalGids: []uint32{100}},
	} {
		u, ok := numericUser(in)
		if ok != (want != nil) || ok && !reflect.DeepEqual(u, *want) {
			t.Errorf("%q: %+v, %v", in, u, ok)
		}
	}
}

func TestNames(t *testing.T) {
	for in, want := range map[string]string{
		"debian":                     "docker.io/library/debian:latest",
		"cube.local/debian:bookworm": "cube.local/debian:bookworm",
		"localhost:5000/a/b":         "localhost:5000/a/b:latest",
		"Debian":                     "",
		"":                           "",
	} {
		got, err := normalize(in)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("normalize(%q) = %q, %v", in, got, err)
		}
	}
	for in, want := range map[string]string{
		"latest": "", "debian:12": "docker.io/library/debian:12", "cube.local/x": "cube.local/x:latest", "a b:c": "",
	} {
		if got := fullName(in); got != want {
			t.Errorf("fullName(%q) = %q, want %q", in, got, want)
		}
	}
	if a, b := randomID(), randomID(); a == b || len(a) != 12 {
		t.Errorf("ids %s, %s", a, b)
	}
}
