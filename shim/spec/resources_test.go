package spec

import (
	"encoding/json"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/vmm"
)

func TestHostNumbersAreDropped(t *testing.T) {
	s := plain()
	s.Linux.Resources = &specs.LinuxResources{
		CPU:     &specs.LinuxCPU{Cpus: "0-63", Mems: "0", Shares: ptr(uint64(512))},
		Memory:  &specs.LinuxMemory{Swappiness: ptr(uint64(60)), Limit: ptr(int64(64 << 20))},
		Network: &specs.LinuxNetwork{ClassID: ptr(uint32(1))},
		Pids:    &specs.LinuxPids{Limit: ptr(int64(10))},
	}
	p, err := Transform(s, defaults())
	if err != nil {
		t.Fatal(err)
	}
	r := p.Guest.Linux.Resources
	if r.CPU.Cpus != "" || r.CPU.Mems != "" || r.Network != nil || r.Memory.Swappiness != nil {
		t.Errorf("left: %+v", r)
	}
	if *r.CPU.Shares != 512 || *r.Memory.Limit != 64<<20 || *r.Pids.Limit != 10 {
		t.Errorf("lost: %+v", r)
	}
}

// TestUpdate goes by JSON, as clients send it.
func TestUpdate(t *testing.T) {
	const unlimited = `{"cpu":{"quota":-1,"period":100000}}`
	for name, c := range map[string]struct {
		resources, guest string
		cpus             float64
	}{
		"memory":               {`{"memory":{"limit":536870912,"swap":536870912}}`, `{"memory":{"limit":536870912,"swap":536870912}}`, 0},
		"memory, nothing said": {`{"memory":{"limit":0}}`, `{"memory":{}}`, 0},
		"memory, no limit":     {`{"memory":{"limit":-1}}`, `{"memory":{"limit":-1}}`, 0},
		"CPUs":                 {`{"cpu":{"quota":50000,"period":100000}}`, `{"cpu":{"quota":50000,"period":100000}}`, 0.5},
		"all CPUs":             {`{"cpu":{"quota":200000,"period":100000}}`, `{"cpu":{"quota":200000,"period":100000}}`, 2},
		"CPUs, default period": {`{"cpu":{"quota":150000}}`, `{"cpu":{"quota":150000,"period":100000}}`, 1.5},
		"CPUs, no limit":       {unlimited, unlimited, 2},
		"no limit, no period":  {`{"cpu":{"quota":-1}}`, unlimited, 2},
		"no quota":             {`{"cpu":{"shares":512,"quota":0,"period":100000}}`, `{"cpu":{"shares":512}}`, 0},
		"weight":               {`{"cpu":{"shares":512}}`, `{"cpu":{"shares":512}}`, 0},
		"pids and unified":     {`{"pids":{"limit":7},"unified":{"memory.high":"1"}}`, `{"pids":{"limit":7},"unified":{"memory.high":"1"}}`, 0},
		"CPU pinning":          {`{"cpu":{"cpus":"0-1","mems":"0"}}`, `{"cpu":{}}`, 0},
		"all of a spec":        {`{"devices":[{"allow":false,"access":"rwm"}],"memory":{"limit":1048576},"blockIO":{"weight":10},"network":{"classID":1},"hugepageLimits":[{"pageSize":"2MB","limit":0}]}`, `{"memory":{"limit":1048576}}`, 0},
		"all of the machine":   {`{"memory":{"limit":1073741824}}`, `{"memory":{"limit":1073741824}}`, 0},
		"what cgroup v1 has":   {`{"memory":{"limit":1,"kernel":1,"swappiness":60}}`, `{"memory":{"limit":1}}`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			guest, cpus, err := Update(decode(t, c.resources), vmm.Shape{VCPUs: 2, MemoryMiB: 1024})
			if err != nil {
				t.Fatal(err)
			}
			b, err := json.Marshal(guest)
			if err != nil {
				t.Fatal(err)
			}
			if string(b) != c.guest || cpus != c.cpus {
				t.Errorf("the guest gets %s, the machine %v CPUs", b, cpus)
			}
		})
	}
}

func TestUpdateRefused(t *testing.T) {
	for name, c := range map[string]struct {
		resources string
		is        func(error) bool
		says      string
	}{
		"nothing":             {`null`, errdefs.IsInvalidArgument, "no resources"},
		"empty":               {`{}`, errdefs.IsInvalidArgument, "no limit"},
		"nothing that's ours": {`{"network":{"classID":1},"devices":[{"allow":true}]}`, errdefs.IsInvalidArgument, "no limit"},
		"memory":              {`{"memory":{"limit":2147483648}}`, errdefs.IsFailedPrecondition, "memory limit 2GiB is more than the machine has (512MiB): make it larger with the annotation io.cube.memory"},
		"CPUs":                {`{"cpu":{"quota":150000,"period":100000}}`, errdefs.IsFailedPrecondition, "1.5 CPUs is more than the machine has (1): give it more with the annotation io.cube.vcpus"},
		"CPUs and no period":  {`{"cpu":{"quota":9223372036854775807}}`, errdefs.IsFailedPrecondition, "io.cube.vcpus"},
		"block devices":       {`{"blockIO":{"throttleReadBpsDevice":[{"major":8,"rate":1}]}}`, errdefs.IsFailedPrecondition, "blockIO"},
		"rdma":                {`{"rdma":{"mlx5_0":{"hcaHandles":1}}}`, errdefs.IsFailedPrecondition, "rdma"},
		"huge pages":          {`{"hugepageLimits":[{"pageSize":"2MB","limit":2097152}]}`, errdefs.IsFailedPrecondition, "2MB"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := Update(decode(t, c.resources), vmm.Shape{VCPUs: 1, MemoryMiB: 512})
			refused(t, err, c.is, c.says)
		})
	}
}

func decode(t *testing.T, s string) *specs.LinuxResources {
	t.Helper()
	var r *specs.LinuxResources
	if err := json.Unmarshal([]byte(s), &r); err != nil {
		t.Fatal(err)
	}
	return r
}
