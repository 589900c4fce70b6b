package spec

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestNamespacesInCommon(t *testing.T) {
	g := guest
	g.Join = map[specs.LinuxNamespaceType]string{"pid": "/proc/7/ns/pid", "uts": "/proc/7/ns/uts"}
	s := sample()
	s.Linux.Namespaces = s.Linux.Namespaces[1:4] // mount, ipc, uts
	got, err := transform(t, s, g)
	if err != nil {
		t.Fatal(err)
	}
	want := []specs.LinuxNamespace{
		{Type: "mount"}, {Type: "ipc"}, {Type: "uts", Path: "/proc/7/ns/uts"}, {Type: "cgroup"},
		{Type: "network", Path: "/proc/1/ns/net"}, {Type: "pid", Path: "/proc/7/ns/pid"},
	}
	if !reflect.DeepEqual(got.Linux.Namespaces, want) {
		t.Errorf("got %v, want %v", got.Linux.Namespaces, want)
	}
	if got.Hostname != "" {
		t.Errorf("the container would rename the others: %q", got.Hostname)
	}
}

func TestPreparedMounts(t *testing.T) {
	size := ""
	g := guest
	g.Files, g.Shares = []string{"/f/0", "/f/1"}, []string{"/s/0"}
	g.Tools = func() (string, error) { return "/tools", nil }
	g.Shm = func(s string) (string, error) { size = s; return "/shm", nil }
	s := sample()
	s.Mounts = []specs.Mount{
		{Destination: "/etc/hosts", Type: "cube-file", Source: "1", Options: []string{"ro", "nosuid"}},
		{Destination: "/data", Type: "cube-share", Source: "0"},
		{Destination: "/dev/shm", Type: "cube-shm", Source: "shm", Options: []string{"nosuid", "mode=1777", "size=64m"}},
		{Destination: "/.cube", Type: "cube-tools", Source: "tools", Options: []string{"ro"}},
		{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"size=1m"}},
	}
	got, err := transform(t, s, g)
	if err != nil {
		t.Fatal(err)
	}
	want := []specs.Mount{
		{Destination: "/etc/hosts", Type: "bind", Source: "/f/1", Options: []string{"bind", "ro", "nosuid"}},
		{Destination: "/data", Type: "bind", Source: "/s/0", Options: []string{"bind"}},
		{Destination: "/dev/shm", Type: "bind", Source: "/shm", Options: []string{"bind", "nosuid"}},
		{Destination: "/.cube", Type: "bind", Source: "/tools", Options: []string{"bind", "ro"}},
		s.Mounts[4],
	}
	if !reflect.DeepEqual(got.Mounts, want) || size != "64m" {
		t.Errorf("got %v and the size %q, want %v", got.Mounts, size, want)
	}
	for _, source := range []string{"1", "-1", "", "x", "0x0", "99999999999"} {
		s.Mounts = []specs.Mount{{Destination: "/data", Type: "cube-share", Source: source}}
		if _, err := transform(t, s, g); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "/data") {
			t.Errorf("%q: %v", source, err)
		}
	}
	s.Mounts = []specs.Mount{{Destination: "/data", Type: "cube-share", Source: "0", Options: []string{"rbind"}}}
	if _, err := transform(t, s, g); !errors.Is(err, ErrInvalid) {
		t.Errorf("a mount of two types: %v", err)
	}
}

func TestResolver(t *testing.T) {
	g := guest
	g.ResolvConf = "/f/1"
	want := specs.Mount{Destination: "/etc/resolv.conf", Type: "bind", Source: "/f/1", Options: []string{"bind", "nosuid", "nodev", "noexec"}}
	for _, c := range []struct {
		destination string // of a mount of the container's own
		readonly    bool
		given       bool
	}{
		{"/proc", false, true},
		{"/proc", true, true},
		{"/etc/hosts", false, true},
		{"/etc/resolv.conf", false, false},
		{"etc/./resolv.conf/", false, false},
		{"/etc", false, false},
	} {
		s := sample()
		s.Root.Readonly = c.readonly
		s.Mounts[0].Destination = c.destination
		got, err := transform(t, s, g)
		if err != nil {
			t.Fatal(err)
		}
		mounts := s.Mounts
		if c.given {
			w := want
			if c.readonly {
				w.Options = append(slices.Clip(w.Options), "ro")
			}
			mounts = append(mounts, w)
		}
		if !reflect.DeepEqual(got.Mounts, mounts) {
			t.Errorf("%+v: %v, want %v", c, got.Mounts, mounts)
		}
	}
	if got, err := transform(t, sample(), guest); err != nil || len(got.Mounts) != 1 {
		t.Errorf("without a resolv.conf: %v, %v", got, err)
	}
}

func TestResources(t *testing.T) {
	got, err := Resources([]byte(`{"devices":[{"allow":true,"access":"rwm"}],"pids":{"limit":7},"hostCgroup":1}`))
	if string(got) != `{"pids":{"limit":7}}` || err != nil {
		t.Errorf("%s, %v", got, err)
	}
	for _, b := range []string{"", "{}", "[]", `{"devices":[{"allow":true}]}`, strings.Repeat(" ", maxSize+1)} {
		if got, err := Resources([]byte(b)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%.20q: %s, %v", b, got, err)
		}
	}
}
