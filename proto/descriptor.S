/* The FileDescriptorSet of all our services, as protoc wrote it. */
    .section .rodata
    .global wire_protoset
    .hidden wire_protoset
    .global wire_protoset_end
    .hidden wire_protoset_end
wire_protoset:
    .incbin PROTOSET
wire_protoset_end:
    .byte 0
    .section .note.GNU-stack, "", %progbits
