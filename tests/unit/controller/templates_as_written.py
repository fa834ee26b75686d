"""Templates of roles as people write them, with their mistakes; see `manifests_as_written`."""

from __future__ import annotations

from tests.unit.controller.manifests_as_written import SCHEMA

TEMPLATES = [
    (
        "token-of-a-hub-as-variable-of-a-trainer",
        "roles: {trainer: {template: {env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: "
        "{name: hub, key: token}}}]}}}",
        "Failed",
        "may not set HF_TOKEN: spec.model.hubTokenSecretRef says it",
    ),
    (
        "volume-of-a-node",
        "roles: {driver: {template: {volumes: [{name: data, hostPath: {path: /}}]}}}",
        "Failed",
        r"volumes\[0\] must have one of emptyDir, .*hostPath is not a field \(volumes are an empty",
    ),
    (
        "volumes-of-a-driver",
        "roles: {driver: {template: {volumes: [{name: shm, emptyDir: {medium: Memory}}], "
        "volumeMounts: [{name: shm, mountPath: /dev/shm}]}}}",
        "Running",
        "",
    ),
    (
        "mount-of-no-volume",
        "roles: {driver: {template: {volumeMounts: [{name: data, mountPath: /mnt/data}]}}}",
        "Failed",
        r"there is no volume 'data' in volumes",
    ),
    (
        "mount-over-tinsmiths-own",
        "roles: {driver: {template: {volumes: [{name: a, emptyDir: {}}], "
        "volumeMounts: [{name: a, mountPath: /tmp/cache}]}}}",
        "Failed",
        r"mountPath is within /tmp, which is Tinsmith's own",
    ),
    (
        "volume-larger-than-a-disk",
        "roles: {driver: {template: {volumes: [{name: a, emptyDir: {sizeLimit: 4Ti}}], "
        "volumeMounts: [{name: a, mountPath: /mnt/a}]}}}",
        "Failed",
        r"64Gi of a node's disk together: .*setting volume_size",
    ),
    (
        "volumes-that-share-a-disk",
        "roles: {driver: {template: {volumes: "
        "[{name: a, emptyDir: {}}, {name: b, emptyDir: {}}], "
        "volumeMounts: [{name: a, mountPath: /mnt/a}, {name: b, mountPath: /mnt/b}]}}}",
        "Failed",
        r"emptyDir volumes a, b of the driver may have 64Gi .*: give each a sizeLimit",
    ),
    (
        "account-that-is-not-allowed",
        "roles: {driver: {template: {serviceAccountName: cloud}}}",
        "Failed",
        r"serviceAccountName of the driver may not name cloud: .*allowed_service_accounts",
    ),
    (
        "init-container-of-a-trainer",
        "roles: {trainer: {template: {initContainers: [{name: a, image: busybox}]}}}",
        "Failed",
        r"the trainer may not have initContainers.*for the driver and for workers",
    ),
    (
        "init-container-without-an-image",
        "roles: {driver: {template: {initContainers: [{name: a}]}}}",
        SCHEMA,
        "'image' is a required property",
    ),
    (
        "init-container-of-a-name-of-our-own",
        "roles: {driver: {template: {initContainers: [{name: tinsmith-data, image: busybox}]}}}",
        "Failed",
        r"initContainers\[0\].*tinsmith-data",
    ),
    (
        "volume-of-a-config-map-that-is-missing",
        "roles: {driver: {template: {volumes: [{name: a, configMap: {name: no-such-map}}], "
        "volumeMounts: [{name: a, mountPath: /mnt/a}]}}}",
        "Queued",
        "ConfigMap no-such-map, which does not exist in namespace",
    ),
    (
        "variables-of-a-config-map-that-is-missing",
        "roles: {driver: {template: {envFrom: [{configMapRef: {name: no-such-map}}]}}}",
        "Queued",
        "ConfigMap no-such-map, which does not exist in namespace",
    ),
    (
        "label-with-a-space",
        'roles: {trainer: {template: {labels: {owner: "Jane Doe"}}}}',
        SCHEMA,
        "'Jane Doe' does not match",
    ),
    (
        "variable-that-is-a-number",
        "roles: {driver: {template: {env: [{name: RUN, value: 7}]}}}",
        SCHEMA,
        "7 is not of type 'string'",
    ),
    (
        "name-of-a-variable",
        "roles: {driver: {template: {env: [{name: A-B, value: x}]}}}",
        SCHEMA,
        "'A-B' does not match",
    ),
    (
        "settings-of-a-driver-of-ones-own",
        "{method: {type: supervised, parameters: {mine: 1}}, "
        "roles: {driver: {template: {image: 'registry.example.com/team/loop:1'}}}}",
        "Running",
        "",
    ),
    (
        "variable-of-a-secret",
        "roles: {driver: {template: {env: [{name: JUDGE_KEY, valueFrom: {secretKeyRef: "
        "{name: keys, key: judge}}}]}}}",
        "Running",
        "",
    ),
    (
        "variable-of-a-config-map-that-is-missing",
        "roles: {driver: {template: {env: [{name: A, valueFrom: {configMapKeyRef: "
        "{name: no-such-map, key: a}}}]}}}",
        "Queued",
        "ConfigMap no-such-map, which does not exist in namespace",
    ),
    (
        "variable-of-a-config-map-that-may-be-missing",
        "roles: {driver: {template: {env: [{name: A, valueFrom: {configMapKeyRef: "
        "{name: no-such-map, key: a, optional: true}}}]}}}",
        "Running",
        "",
    ),
    (
        "variable-of-two-sources",
        "roles: {driver: {template: {env: [{name: A, value: x, valueFrom: {secretKeyRef: "
        "{name: keys, key: a}}}]}}}",
        "Failed",
        r"env\[0\] must have a value, or one source in valueFrom",
    ),
    (
        "variable-of-a-secret-without-its-key",
        "roles: {driver: {template: {env: [{name: A, valueFrom: {secretKeyRef: {name: keys}}}]}}}",
        SCHEMA,
        "'key' is a required property",
    ),
    ("variables-as-a-map", "roles: {driver: {template: {env: {A: x}}}}", SCHEMA, "type 'array'"),
    (
        "variable-that-is-a-truth-value",
        "roles: {driver: {template: {env: [{name: DEBUG, value: true}]}}}",
        SCHEMA,
        "True is not of type 'string'",
    ),
    (
        "variable-that-is-set-already",
        "roles: {driver: {template: {env: [{name: OPENAI_API_KEY, value: sk-mine}]}}}",
        "Failed",
        r"template\.env of the driver sets OPENAI_API_KEY, which Tinsmith sets itself.*other name",
    ),
    (
        "all-variables-of-a-secret-for-a-trainer",
        "roles: {trainer: {template: {envFrom: [{secretRef: {name: keys}}]}}}",
        "Failed",
        r"the trainer may not have initContainers, envFrom .*for the driver and for workers",
    ),
    (
        "nodes-of-a-trainer-that-there-are-not",
        "roles: {trainer: {template: {nodeSelector: {pool: a100}}}}",
        "Queued",
        "for the trainer: no node that would do has the label pool=a100",
    ),
    (
        "nodes-of-a-driver-that-there-are-not",
        "roles: {driver: {template: {nodeSelector: {pool: cpu}}}}",
        "Queued",
        "for the driver: no node that would do has the label pool=cpu",
    ),
    (
        "nodes-of-a-role-beside-its-template",
        "roles: {trainer: {nodeSelector: {pool: a100}}}",
        "Failed",
        r"trainer\.nodeSelector is not a field \(it is a field of the role's template\)",
    ),
    (
        "toleration-of-a-role-that-is-not-allowed",
        "roles: {trainer: {template: {tolerations: [{key: spot, operator: Exists}]}}}",
        "Failed",
        r"template\.tolerations of the trainer may not name spot: .*allowed_tolerations",
    ),
    (
        "node-selector-with-a-space",
        "roles: {trainer: {template: {nodeSelector: {pool: big ones}}}}",
        "Failed",
        r"nodeSelector\.pool is 'big ones': a label has at most 63 letters",
    ),
    (
        "priority-of-a-template",
        "roles: {trainer: {template: {priorityClassName: high}}}",
        "Failed",
        r"template\.priorityClassName is not a field \(it is a field of spec\.scheduling\)",
    ),
    (
        "volume-of-a-claim",
        "roles: {driver: {template: {volumes: [{name: corpus, persistentVolumeClaim: "
        "{claimName: corpus}}], volumeMounts: [{name: corpus, mountPath: /mnt/corpus}]}}}",
        "Running",
        "",
    ),
    (
        "volume-of-a-claim-in-short",
        "roles: {driver: {template: {volumes: [{name: a, persistentVolumeClaim: corpus}]}}}",
        SCHEMA,
        "'corpus' is not of type 'object'",
    ),
    (
        "volume-with-a-wrong-unit",
        "roles: {driver: {template: {volumes: [{name: a, emptyDir: {sizeLimit: 8GB}}]}}}",
        "Failed",
        r"emptyDir\.sizeLimit must be an amount such as 8Gi",
    ),
    (
        "shared-memory-of-a-trainer",
        "roles: {trainer: {template: {volumes: [{name: shm, emptyDir: {medium: Memory}}], "
        "volumeMounts: [{name: shm, mountPath: /dev/shm}]}}}",
        "Failed",
        r"mountPath is within /dev/shm, which is Tinsmith's own",
    ),
    (
        "pull-secret",
        "roles: {driver: {template: {imagePullSecrets: [{name: registry}]}}}",
        "Running",
        "",
    ),
    (
        "pull-secret-by-its-name-alone",
        "roles: {driver: {template: {imagePullSecrets: [registry]}}}",
        SCHEMA,
        "'registry' is not of type 'object'",
    ),
    (
        "pull-secret-of-one",
        "roles: {driver: {template: {imagePullSecret: registry}}}",
        "Failed",
        r"imagePullSecret is not a field \(did you mean imagePullSecrets\?\)",
    ),
    (
        "account-in-its-old-name",
        "roles: {driver: {template: {serviceAccount: cloud}}}",
        "Failed",
        r"serviceAccount is not a field \(did you mean serviceAccountName\?\)",
    ),
    (
        "annotation-of-ones-own",
        "roles: {driver: {template: {annotations: {team: math}, labels: {team: math}}}}",
        "Running",
        "",
    ),
    (
        "annotation-of-another-system",
        "roles: {driver: {template: {annotations: {prometheus.io/scrape: 'true'}}}}",
        "Failed",
        r"annotations of the driver may not name prometheus.io/scrape: .*allowed_annotations",
    ),
    (
        "annotation-that-is-a-truth-value",
        "roles: {driver: {template: {annotations: {scrape: true}}}}",
        SCHEMA,
        "True is not of type 'string'",
    ),
    (
        "annotation-with-a-space-in-its-name",
        "roles: {driver: {template: {annotations: {my note: x}, labels: {a/b/c: x}}}}",
        "Failed",
        r"labels names 'a/b/c'; .*annotations names 'my note'; a name has at most 63 letters",
    ),
    (
        "init-container",
        "roles: {driver: {template: {initContainers: [{name: fetch, image: busybox, "
        "command: [sh, -c, 'echo'], env: [{name: A, value: x}]}]}}}",
        "Running",
        "",
    ),
    (
        "init-container-with-resources",
        "roles: {driver: {template: {initContainers: [{name: a, image: busybox, "
        "resources: {limits: {memory: 1Gi}}}]}}}",
        "Failed",
        r"initContainers\[0\]\.resources is not a field \(it is a field of the role",
    ),
    (
        "sidecar",
        "roles: {driver: {template: {containers: [{name: a, image: busybox}]}}}",
        "Failed",
        r"template\.containers is not a field \(a pod has one container",
    ),
    (
        "network-of-the-node",
        "roles: {driver: {template: {hostNetwork: true}}}",
        "Failed",
        r"hostNetwork is not a field \(pods of jobs see nothing of their node\)",
    ),
    (
        "restart-policy-of-a-pod",
        "roles: {driver: {template: {restartPolicy: OnFailure}}}",
        "Failed",
        r"restartPolicy is not a field \(spec\.failurePolicy and spec\.backoffLimit say it\)",
    ),
    (
        "command-as-text",
        "roles: {driver: {template: {command: python train.py}}}",
        SCHEMA,
        "'python train.py' is not of type 'array'",
    ),
    (
        "image-in-capitals",
        "roles: {driver: {template: {image: 'registry.example.com/Team/loop:1'}}}",
        "Failed",
        r"image is '\S+/Team/loop:1', which no registry has; .*small letters alone in the name",
    ),
    (
        "image-with-two-tags",
        "roles: {driver: {template: {initContainers: [{name: a, image: 'loop:1:2'}]}}}",
        "Failed",
        r"initContainers\[0\]\.image is 'loop:1:2', which no registry has",
    ),
    (
        "image-by-its-digest",
        "roles: {driver: {template: {image: 'localhost:5000/a/b__c-d:1.0@sha256:%s'}}}"
        % ("0f" * 32),
        "Running",
        "",
    ),
    (
        "image-of-a-trainer",
        "roles: {trainer: {template: {image: 'registry.example.com/trainer:1'}}}",
        "Failed",
        "the trainer may not run the image registry.example.com/trainer:1, because",
    ),
    (
        "pod-below-the-template",
        "roles: {trainer: {template: {spec: {containers: []}}}}",
        "Failed",
        r"template\.spec is not a field \(the fields of a pod stand in the template itself\)",
    ),
    (
        "resources-of-a-template",
        "roles: {trainer: {template: {resources: {limits: {memory: 8Gi}}}}}",
        "Failed",
        r"template\.resources is not a field \(it is a field of the role\)",
    ),
    (
        "image-beside-the-template",
        "roles: {driver: {image: 'loop:1'}}",
        "Failed",
        r"driver\.image is not a field \(it is a field of the role's template\)",
    ),
    (
        "privileges",
        "roles: {driver: {template: {securityContext: {privileged: true}}}}",
        "Failed",
        r"securityContext is not a field \(pods of jobs have no privileges",
    ),
    (
        "runtime-class",
        "roles: {trainer: {template: {runtimeClassName: nvidia}}}",
        "Failed",
        r"runtimeClassName is not a field \(pods run in the default runtime of their node\)",
    ),
    (
        "scheduler-of-anothers",
        "roles: {trainer: {template: {schedulerName: volcano}}}",
        "Failed",
        r"schedulerName is not a field \(nodes are chosen by nodeSelector, .*topology",
    ),
    (
        "node-by-its-name",
        "roles: {trainer: {template: {nodeName: n0}}}",
        "Failed",
        r"nodeName is not a field \(nodes are chosen by nodeSelector, .*topology",
    ),
    (
        "grace-of-a-pod",
        "roles: {driver: {template: {terminationGracePeriodSeconds: 30}}}",
        "Failed",
        r"is not a field \(spec\.scheduling\.preemptionGraceSeconds says it\)",
    ),
    (
        "keys-of-another-job",
        "roles: {driver: {template: {envFrom: [{secretRef: {name: other-pod-keys}}]}}}",
        "Failed",
        "the driver may not read the Secret other-pod-keys of the deployment",
    ),
    (
        "keys-of-the-trainer-for-the-driver",
        "roles: {driver: {template: {env: [{name: A, valueFrom: {secretKeyRef: "
        "{name: a-pod-keys, key: trainer-key}}}]}}}",
        "Failed",
        "the driver may not read the Secret a-pod-keys of the deployment",
    ),
    (
        "mount-without-its-volume",
        "roles: {driver: {template: {volumeMounts: [{name: a, mountPath: /x}]}}}",
        "Failed",
        r"volumeMounts\[0\]\.name: there is no volume 'a' in volumes",
    ),
    (
        "volume-without-a-mount",
        "roles: {driver: {template: {volumes: [{name: a, emptyDir: {}}]}}}",
        "Failed",
        r"the volume a of the driver is mounted nowhere; name it in template\.volumeMounts",
    ),
    (
        "variable-given-twice",
        "roles: {driver: {template: {env: [{name: A, value: x}, {name: A, value: y}]}}}",
        "Failed",
        r"template\.env of the driver sets A twice, and the first has no effect",
    ),
    (
        "argument-that-is-a-number",
        "roles: {driver: {template: {args: [--steps, 5]}}}",
        SCHEMA,
        "5 is not of type 'string'",
    ),
]
